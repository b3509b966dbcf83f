"""Is this machine fit to train on? Facts, gathered once, and rules that judge them. Imports no
torch.
"""
