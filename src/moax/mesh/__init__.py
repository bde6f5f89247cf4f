"""This package runs ops on a mesh: it has the roles of axes, the algebra of specs, partition rules and collectives."""
