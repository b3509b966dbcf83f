"""Relations that hold for every data-parallel script: on N ranks it does what it does on one.

A run is changed in a way that must not matter, and what must not change is compared. Metamorphic
testing is the field's name for it (Chen, Cheung and Yiu, 1998).
"""
