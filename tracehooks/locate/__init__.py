"""Where the first non-finite value was born: which op, in which module, on which line, and why."""
