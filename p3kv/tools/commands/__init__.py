"""The commands of `p3kv`, a module each; `COMMANDS` has them in the order of the help.

A module has HELP, USAGE and DESCRIPTION, `add(parser)`, which adds the command's arguments, and
`do(options)`, which runs the command and returns the exit code. A module imports what its command
needs inside `do`, so that the help comes at once. Where `do` raises an error of
p3kv's, users see it as one line that begins with the command's name. Lines of a description have at
most 80 characters.
"""

from p3kv.tools.commands import compare, doctor, launch, plan, run, top, trace, tune

COMMANDS = (launch, run, compare, tune, top, trace, plan, doctor)
