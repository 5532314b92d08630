"""`plimsoll plan`: what a model needs and how much of it fits, before anything runs."""
