"""Who owns what in a job of uneven TP degrees: ints in, frozen plans out, no torch.

`partition` cuts families of units, `topology` numbers ranks, `batch` shares out microbatches,
`model` names the sizes, and `plan` puts them into one versioned, digestible `Plan`.
"""
