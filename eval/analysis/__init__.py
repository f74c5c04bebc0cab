"""What routers do, in numbers that stand beside what chance would give.

`tape.Tape` holds what a model did on held-out text; the other files are pure functions of arrays, each with its null.

Shape suffixes beyond the project's legend: A assignments (token, expert) in token order, M labels of any kind, R units
that are resampled (documents or rows), X anything.
"""
