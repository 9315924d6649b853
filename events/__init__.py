"""What happened, told to others: event types, topics, and the envelope they travel in.

It may import `model`. Producer, consumers (billing, audit) and telemetry are not here yet.
"""
