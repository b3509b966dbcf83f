"""What looks at a run from outside: report, profiler, scaling, verify, diff, doctor, learn,
recommend.
"""
