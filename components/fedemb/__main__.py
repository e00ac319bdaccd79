"""`python -m fedemb`: the command line."""

from fedemb.pipelines.cli.main import main

if __name__ == "__main__":
    main()
