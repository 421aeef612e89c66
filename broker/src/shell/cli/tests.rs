//! What the command line accepts and refuses.

use super::*;

/// Parses a command line; the error is clap's kind.
fn check(line: &str) -> Result<Command, clap::error::ErrorKind> {
    let arguments = std::iter::once("ringfence").chain(line.split_whitespace());
    Cli::try_parse_from(arguments)
        .map(|cli| cli.command)
        .map_err(|error| error.kind())
}

#[test]
fn the_definition_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn commands_of_the_contract_are_accepted() {
    for line in [
        "topics create a --partitions 8 --replication-factor 1 --config retention.ms=5 --config x=y=z",
        "topics create a --if-not-exists --bootstrap host:1 --json",
        "topics list",
        "topics describe",
        "topics describe a --json",
        "topics alter a --config segment.bytes=1048576",
        "topics alter a --delete-config retention.ms",
        "topics add-partitions a --partitions 16",
        "topics delete a --if-exists",
        "produce a",
        "produce a --partition 3 --key-separator : --acks 0 --batch-bytes 1000",
        "consume a --partition 1 --partition 2 --from 17 --max 3 --follow --json",
        "consume a --from beginning",
        "consume a --from end",
        "cluster --watch --interval 2",
        "serve --data-dir d --node-id 1 --cores 0,2-5 --native 127.0.0.1:1 --admin 127.0.0.1:2",
        "serve --config f --metadata embedded --advertised-native h:1 --journal-bytes 1 --set a=b",
        "dump a b --verify",
        "dump a --records --json",
        "doctor --data-dir d --json",
        "completions fish",
        "man out",
    ] {
        assert!(check(line).is_ok(), "{line}");
    }
}

#[test]
fn wrong_usage_is_refused() {
    use clap::error::ErrorKind::*;
    for (line, kind) in [
        ("topics create", MissingRequiredArgument),
        ("topics create a --partitions 0", ValueValidation),
        ("topics create a --config retention.ms", ValueValidation),
        ("topics create a --config =5", ValueValidation),
        ("topics alter a", MissingRequiredArgument),
        ("topics add-partitions a", MissingRequiredArgument),
        ("produce", MissingRequiredArgument),
        ("produce a --acks 2", InvalidValue),
        ("produce a --batch-bytes 0", ValueValidation),
        ("produce a --batch-bytes 99999999999", ValueValidation),
        ("produce a --key-separator", InvalidValue),
        ("consume a --from -1", UnknownArgument),
        ("consume a --from=-1", ValueValidation),
        ("consume a --from middle", ValueValidation),
        ("cluster --interval 2", MissingRequiredArgument),
        ("dump", MissingRequiredArgument),
        ("dump a --records --verify", ArgumentConflict),
        ("elect", InvalidSubcommand),
        ("", DisplayHelpOnMissingArgumentOrSubcommand),
    ] {
        assert_eq!(check(line).err(), Some(kind), "{line}");
    }
}

#[test]
fn every_command_has_help_and_a_manual_page() {
    let dir = tempfile::tempdir().unwrap();
    clap_mangen::generate_to(Cli::command(), dir.path()).unwrap();
    let mut pending = vec![Cli::command()];
    while let Some(command) = pending.pop() {
        let name = command.get_name().to_owned();
        assert!(command.get_about().is_some(), "{name} says what it does");
        pending.extend(command.get_subcommands().cloned());
    }
    for page in ["ringfence.1", "ringfence-topics-create.1", "ringfence-consume.1"] {
        assert!(dir.path().join(page).is_file(), "{page}");
    }
}

#[test]
fn tables_align_text_left_and_numbers_right() {
    let mut table = output::Table::new(&["NAME", "COUNT"]);
    table.row(vec!["a".to_owned(), "5".to_owned()]);
    table.row(vec!["longer".to_owned(), "-".to_owned()]);
    assert_eq!(table.text(), "NAME    COUNT\na           5\nlonger      -\n");
}
