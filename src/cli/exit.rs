//! How a command ends: the exit codes of the command line, and errors that carry one of them.

use std::process::ExitCode;

use super::client::refusal;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    Ok = 0,
    Failure = 1,
    /// Asked for something that cannot be.
    Usage = 2,
    /// A promise was seen broken.
    Broken = 3,
    /// There is no such thing.
    Missing = 4,
    /// It is not the moment: something else is under way, or was first.
    Conflict = 5,
    /// The server is away, or not ready.
    Unavailable = 6,
    Interrupted = 130,
}

impl Exit {
    /// An error that ends the command with this code.
    pub fn because(self, message: impl Into<String>) -> anyhow::Error {
        Ended { exit: self, message: message.into() }.into()
    }

    /// The code of an error: its own if it carries one, else what the server's refusal amounts to, else plain failure.
    pub fn of(error: &anyhow::Error) -> Self {
        if let Some(ended) = error.chain().find_map(|cause| cause.downcast_ref::<Ended>()) {
            return ended.exit;
        }
        match refusal(error).map(|status| status.as_u16()) {
            Some(404) => Self::Missing,
            Some(409) => Self::Conflict,
            Some(400 | 422) => Self::Usage,
            // Not now; 502 and 504 are what a proxy says of a server that is away.
            Some(429 | 502 | 503 | 504) => Self::Unavailable,
            None if error.is::<clap::Error>() => Self::Usage,
            _ => Self::Failure,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

#[derive(Debug, thiserror::Error)]
#[error("{message}")]
struct Ended {
    exit: Exit,
    message: String,
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn an_error_keeps_its_code_whatever_is_said_around_it() {
        let away = Err::<(), _>(Exit::Unavailable.because("away")).context("asking").context("waiting");
        assert_eq!(Exit::of(&away.unwrap_err()), Exit::Unavailable);
        assert_eq!(Exit::of(&anyhow::anyhow!("any other")), Exit::Failure);
    }
}
