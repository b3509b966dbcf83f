"""Several nodes: an agent on each looks (agent), decides (policy) and tells the others (peers,
rendezvous).

What is lost while ranks train is left out by all launchers together, and the others go on in place
(council).

Who notices what is lost. The ranks: a peer whose connection closes. torchelastic, within 3 s: a
node that does not come to meet the others (launch.LIMITS). The kernel, at once: an agent that was
killed (lifelines). The agents' beats: a node of which nothing is heard, after 6 s, or 15 s where
the others cannot go on without it (peers). The kernel, after as long: the store's node
(launch.limit_silence); it is replaced once it has been silent in the run directory too
(rendezvous)."""
