"""The shapes that all of Ergosphere speaks: ids, jobs, placements, states, activity contracts, the manifest.

No behaviour beyond validation, and no import of the other packages. Pydantic reads and writes them at borders;
inside they are frozen, slotted dataclasses. What is public here is versioned: see docs/compatibility.md.
"""
