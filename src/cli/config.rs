//! `stockade config`: every setting, its value and where that comes from; secrets are masked.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::parser::ValueSource;
use clap::{Args, FromArgMatches};
use serde_json::{Value, json};
use stockade::config::Settings;
use stockade::secret_files;
use stockade_kernel::secrets::mask;

use super::exit::Exit;
use super::out;
use super::table::table;

#[derive(Args)]
pub struct Config {
    /// Only say whether a server could start with these settings.
    #[arg(long)]
    check: bool,

    /// Print JSON, for programs.
    #[arg(long)]
    json: bool,

    /// The flags that `serve` takes, after `--`.
    #[arg(last = true)]
    flags: Vec<OsString>,
}

/// A setting as it stands.
struct Setting {
    name: String,
    value: String,
    origin: &'static str,
}

impl Config {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let command = Settings::augment_args(clap::Command::new("stockade"));
        let given = std::iter::once(OsString::from("stockade")).chain(self.flags);
        let matches = command.clone().try_get_matches_from(given)?;
        let settings = Settings::from_arg_matches(&matches)?;
        let checked = settings.validate().and_then(|()| settings.keys().map(drop));
        let wrong = |error: anyhow::Error| Exit::Usage.because(format!("{error:#}"));
        if self.check {
            checked.map_err(wrong)?;
            eprintln!("A server could start with these settings.");
            return Ok(ExitCode::SUCCESS);
        }
        let all: Vec<Setting> = command.get_arguments().filter_map(|arg| setting(&command, arg, &matches)).collect();
        if self.json {
            let row =
                |setting: &Setting| json!({ "name": setting.name, "value": setting.value, "origin": setting.origin });
            out::print(&out::json(&all.iter().map(row).collect::<Vec<Value>>())?)?;
        } else {
            let rows = all.into_iter().map(|setting| [setting.name, setting.value, setting.origin.to_owned()]);
            out::print(&table(["SETTING", "VALUE", "FROM"], rows))?;
        }
        checked.map_err(wrong)?;
        Ok(ExitCode::SUCCESS)
    }
}

fn setting(command: &clap::Command, arg: &clap::Arg, matches: &clap::ArgMatches) -> Option<Setting> {
    let name = arg.get_env()?.to_string_lossy().into_owned();
    let id = arg.get_id().as_str();
    let values = matches.get_raw(id).into_iter().flatten().map(|value| value.to_string_lossy());
    let value = values.collect::<Vec<_>>().join(",");
    let origin = match matches.value_source(id) {
        Some(ValueSource::CommandLine) => "flag",
        Some(ValueSource::EnvVariable) => "environment",
        _ => "default",
    };
    if let Ok(Some(held)) = secret_files::from_file(matches, command, id) {
        return Some(Setting { name, value: mask(&held), origin: "file" });
    }
    let value = if secret_files::holds_a_secret(arg) { mask(&value) } else { value };
    Some(Setting { name, value, origin })
}
