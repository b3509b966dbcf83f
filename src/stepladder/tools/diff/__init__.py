"""Where two runs first part, and why: by their records, then by training both again up to that
step.
"""
