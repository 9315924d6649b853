"""The policy: who runs where, so that service levels hold and nothing is idle.

`Book` holds what is known (nodes, jobs, what was promised and delivered) and is kept up to date by what happens;
`Planner` looks at it and decides. Times are seconds on one clock that the caller owns; there is no clock, no randomness
and no I/O here, and no order that depends on history: a book that is rebuilt from its snapshot plans the same.
"""
