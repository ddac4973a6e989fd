//! Data on stdout: all of it, or an error that says why not; and no character in it that could drive a terminal.

use std::io::{ErrorKind, Write};

use anyhow::Context;
use serde::Serialize;

/// Prints, and says whether anybody still reads: one that went away (`| head`) has seen enough.
pub fn print(text: &str) -> anyhow::Result<bool> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error).context("cannot write to stdout"),
    }
}

/// JSON for people who read it, too.
pub fn json<T: Serialize>(data: &T) -> anyhow::Result<String> {
    Ok(without_controls(&serde_json::to_string_pretty(data)?) + "\n")
}

/// JSON without a break in it.
pub fn json_line<T: Serialize>(data: &T) -> anyhow::Result<String> {
    Ok(without_controls(&serde_json::to_string(data)?) + "\n")
}

/// JSON escapes the control characters that it must; this the others, which some terminals obey too.
fn without_controls(json: &str) -> String {
    let escape = |c: char| if c.is_control() && c != '\n' { format!("\\u{:04x}", u32::from(c)) } else { c.to_string() };
    json.chars().map(escape).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_means_the_same_and_drives_no_terminal() {
        let data = serde_json::json!({ "a": "\u{1b}[2J\u{9b}31m\u{7f}\nä" });
        for text in [json(&data).unwrap(), json_line(&data).unwrap()] {
            assert!(!text.trim_end().chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
            assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), data);
        }
    }
}
