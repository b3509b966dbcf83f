"""Find the first step at which two runs diverge, and why.

The records of both runs are compared first. If they do not explain the difference, both runs are
trained again up to that step.
"""
