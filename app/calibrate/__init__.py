"""`plimsoll calibrate`: what a step of a running engine costs."""
