"""`plimsoll replay`: what a policy would make of a trace of requests, without a device."""
