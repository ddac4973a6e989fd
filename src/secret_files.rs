//! Secrets from files: each setting that holds a secret has a twin that names a file.

use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command, value_parser};
use stockade_kernel::secrets::Masked;

/// The settings under it were added by [`with_files`].
const FILES_HEADING: &str = "Secrets from files";

/// Gives every setting that holds a secret a twin that names a file: `--x-file` and `X_FILE` beside `--x` and `X`.
pub fn with_files(command: Command) -> Command {
    let secrets = command.get_arguments().filter(|arg| holds_a_secret(arg)).map(|arg| {
        let name = arg.get_env().unwrap_or_default().to_string_lossy();
        let long = arg.get_long().unwrap_or_default();
        Arg::new(file_id(arg.get_id().as_str()))
            .long(format!("{long}-file"))
            .env(format!("{name}_FILE"))
            .value_name("PATH")
            .value_parser(value_parser!(PathBuf))
            .help(format!("A file that holds what --{long} would say"))
            .help_heading(FILES_HEADING)
    });
    let files: Vec<Arg> =
        secrets.filter(|file| command.get_arguments().all(|arg| arg.get_id() != file.get_id())).collect();
    command.args(files)
}

/// What `--help` does not show from the environment is what nobody should see anywhere.
pub fn holds_a_secret(arg: &Arg) -> bool {
    arg.is_hide_env_values_set()
}

/// What the file of a setting says, if it has one that counts: flags over environment, as ever; on the same level the
/// setting and its file exclude each other.
pub fn from_file(matches: &ArgMatches, command: &Command, id: &str) -> Result<Option<Masked>, clap::Error> {
    let file = file_id(id);
    let find = |id: &str| command.get_arguments().find(|arg| arg.get_id() == id);
    if find(&file).and_then(Arg::get_help_heading) != Some(FILES_HEADING) {
        return Ok(None);
    }
    let Some(path) = matches.get_one::<PathBuf>(&file) else { return Ok(None) };
    let name = |id: &str, source| {
        let arg = find(id);
        let name = match source {
            ValueSource::CommandLine => arg.and_then(Arg::get_long).map(|long| format!("--{long}")),
            _ => arg.and_then(Arg::get_env).map(|env| env.to_string_lossy().into_owned()),
        };
        name.unwrap_or_else(|| id.to_owned())
    };
    let source = matches.value_source(&file).unwrap_or(ValueSource::DefaultValue);
    let refuse = |why: String| clap::Error::raw(ErrorKind::ValueValidation, format!("{why}\n"));
    match matches.value_source(id) {
        Some(ValueSource::CommandLine) if source == ValueSource::EnvVariable => return Ok(None),
        Some(given) if given == source => {
            let (value, file) = (name(id, given), name(&file, source));
            return Err(refuse(format!("{value} and {file} are both given: leave one of them out")));
        }
        _ => {}
    }
    let name = name(&file, source);
    let text = std::fs::read_to_string(path)
        .map_err(|error| refuse(format!("{name}: cannot read {}: {error}", path.display())))?;
    // Editors and `echo` end the last line.
    match text.trim_end_matches(['\r', '\n']) {
        "" => Err(refuse(format!("{name}: {} is empty", path.display()))),
        text => Ok(Some(Masked::new(text))),
    }
}

fn file_id(id: &str) -> String {
    format!("{id}_file")
}
