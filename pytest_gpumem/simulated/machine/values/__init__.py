"""Values beside shapes: which are known, what is taken for granted of others, what a read yields.

A value is *known* where the code under test determines it: of a factory, of an index, of a mask of
a known length. Of other values only *facts* are known, such as that they are finite. Reading an
unknown one yields a *neutral* number: fit for printing and storing, while whoever decides by it is
told that nobody knows.

``neutral`` imports no torch.
"""
