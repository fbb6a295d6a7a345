"""The pool: who boots where and when, who holds what, and what is swept."""
