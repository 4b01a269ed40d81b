"""Request: flags, configuration files and scripts -> Job.

    request_flags.py              declares the flags of requests; command_flags.py: of one command
    flags.py                      `Flags` holds them as typed
      |
    sources/                      reads each source into small frozen values (values.py)
      |  command_line.py            flags            -> FlagValues, without flag_conflicts.py
      |  config_file.py             --config         -> UserFile
      |  launch_script.py           --from-command   -> UserFile, with the TOML or YAML it names
      |    trl_launch.py              TRL's, framework_launch.py: another framework's settings, with
      |                                   copied_settings, uncounted_settings
      |  training_script.py         --script         -> UserFile
      |  exported_variables.py      the shell        -> HeldSetting
      |  length_sources.py          --lengths        -> TokenLengths
      |  reader.py                  remembers what was read
      |
    precedence.py                 merges them: which source wins, in one table
      |
    searched_space.py             the space around what is held; checks named values
      |
    inputs.py                     what the request rests on: hardware, interpreter, user's file
    merged_settings.py            settings of all sources, and the space around them
    workload_builder.py           model, lengths, batch
      |
    job_builder.py                builds the Job of these, with notes.py for its reader
      |                             (command_job.py for a command of the user's own); refuses a
      |                             file that can't be trained (illegal_file.py)
      |
    measured_data.py              completes it with lengths of the user's data
      |
    request_parser.py             is the way through: Flags -> RequestSources -> ParsedRequest

Helpers: assignments.py (`K=V`), origins.py, resources.py (hardware, packages, storage), images.py.

Only `sources/` sees what a user wrote: flags, files and variables. What is behind it sees values
whose names and types are checked. Each held setting carries its origin (origins.py): the flag, the
file with its line, or the variable that states it.

A command may ask about several variations of a request: unknown values (`predict`), other values
of a setting or other GPUs (`solve`). `RequestSources` reads its sources once for all of them.
"""
