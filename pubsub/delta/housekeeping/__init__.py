"""Keep Delta tables small: merge and rewrite data files, remove old ones, clean the log.

    choose_files   which data files are worth rewriting
    rewrite        rewrites them while batches go on being committed
    retention      how long a table keeps removed files and its log: properties that follow the settings
    inventory      what lies in a table's directory and in its log
    upkeep         one visit to a table: VACUUM, clean-up of the log, what the retention costs

launcher/housekeeper.py decides when, and for which tables.
"""
