"""The side effects that workflows ask for, by the contracts in `model.runtime`.

Nothing is here yet. It may import everything but `workflows`.
"""
