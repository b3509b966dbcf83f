"""Observe a user's script from inside its processes, without an edit, import or wrapper in it.

The launcher puts the folder `startup` on the ranks' PYTHONPATH. Each interpreter runs its
`sitecustomize` at start, which attaches what the environment asks for once torch is imported.
Processes that are not observed load nothing of this.
"""
