"""`plimsoll bench`: what any OpenAI-compatible server does under load, seen from a client's side."""
