"""How a build of the runtime is made: the interpreter it is for, the compiler, the rank directory."""
