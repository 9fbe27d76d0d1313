"""Values of tensors: known ones, assumptions about unknown ones, and results of reads.

A value is *known* where the code under test determines it: of a factory, of an index, of a mask of
a known length. Of other values only *facts* are known, such as that they are finite. Reading an
unknown one yields a *placeholder*, which can be printed and stored, while a decision by it raises
an error.

``placeholder`` imports no torch.
"""
