"""Multiple-choice tasks: requests from files, their scores, and a task made from a run's held-out text."""
