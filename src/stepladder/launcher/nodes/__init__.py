"""Several nodes: an agent on each looks (agent), decides (policy) and tells the others (peers, rendezvous).

Who notices what is lost. The ranks: a peer whose connection closes. torchelastic, within 3 s: a node that does not
come to meet the others (launch.LIMITS). The agents' beats, after 15 s: a node of which nothing is heard (peers).
The kernel, after as long: the store's node (launch.limit_silence); it is replaced once it has been silent in the
run directory too (rendezvous).
"""
