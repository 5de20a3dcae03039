"""The `outrider` command.

main            parses arguments, runs a subcommand, turns errors into one sentence
commands        the subcommands
up, serve       start services; `settings` are theirs
generate        one request; `request`: its flags, `timeline`: its picture
bench           load on a server; `top`: figures of running services
plan            what a pair needs of a device
advise          which draft to take; `distill` trains one, `layer_search` finds layers to skip
drafts          shows and changes the roles of draft replicas
mistakes        explains wrong command lines
model_flags     flags of several commands; `values`: what they may be
named_models    checks models that flags name; `prompt_ids`: prompts, `files`: files
say             what a command writes to standard error
"""
