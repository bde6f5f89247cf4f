"""How ops run on a mesh: roles of axes, the algebra of specs, partition rules, collectives."""
