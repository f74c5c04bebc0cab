"""Audits of a trained run: bias, leakage of training text, energy. `python -m eval.audit RUN` runs them."""
