"""Pure policy and bookkeeping: no torch, sockets, threads, clock or environment. Time is an argument."""
