"""Writers of the files of this repository that follow from its code."""
