"""The local fleet: Temporal, Kafka, workers and node agents as processes of one machine, under one supervisor."""
