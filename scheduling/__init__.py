"""Pure policy: state, what came in and the time go in, a plan with reasons comes out.

`ledger.apply` folds notices into a `state.ClusterState`, `policy.decide` plans, `ledger.commit` records the plan.
It imports `model` only, has no clock and no randomness, and knows nothing of workflows.
"""
