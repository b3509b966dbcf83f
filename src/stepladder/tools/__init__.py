"""What looks at a run from outside: report, profiler, scaling, verify, doctor, learn, recommend."""
