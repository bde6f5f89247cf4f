"""The MoE block on one device and on a mesh, and a step of the language model, each in a process of its own."""
