"""A trace of requests played through the code that serves, in simulated time."""
