"""The levels above a cluster: regions move jobs between clusters, the fleet moves them between regions.

Both are the same pure function over summaries of what is below (`movement.decide`). A level knows no devices: it asks
one member at a time whether a job would start there, has the job given up where it waits, and hands it on. A job is in
one place at any time: in a member's book, or in the level's own state while it is handed on. If a level is lost, those
below go on with what they have.
"""
