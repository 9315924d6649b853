"""What brings Ergosphere up: the local fleet, the node agent, workers, the broker, settings and dashboards.

Nothing is here yet. It may import everything.
"""
