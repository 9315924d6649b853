"""Pure policy: state, what came in and the time go in, a plan with reasons comes out.

No clock, no randomness, nothing of workflows; of the rest of the project it imports `model` only.

- `core`: the policy itself, on numbers of devices. The same for the live fleet and for the simulator.
- `hierarchy`: the levels above a cluster.
- `simulator`: the policy on job traces, beside others.
- The live scheduler of a cluster: `ledger.apply` folds notices into a `state.ClusterState`, `policy.decide` plans (on a
  book of the core that `bridge` makes of the state), `ledger.commit` records the plan. `wishes` grants what persons ask
  of running jobs, `accounts` counts what was delivered, `reconcile` compares the ledger with what nodes say, `reasons`
  has the sentences, `constants` the times and bounds of a live fleet, `fitting` what a gang is.
"""
