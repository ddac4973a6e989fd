//! What a demo found, on stdout: its figures, and each proof with what was expected and what was there.

use std::io::Write;

use anstyle::{AnsiColor, Style};
use serde::Serialize;
use serde_json::{Map, Value, json};

const GOOD: Style = AnsiColor::Green.on_default().bold();
const BAD: Style = AnsiColor::Red.on_default().bold();

#[derive(Debug, Serialize)]
pub struct Report {
    demo: &'static str,
    proven: bool,
    /// The server it ran on: its URL, whether it was the demo's own, and the engines under it.
    server: Map<String, Value>,
    figures: Map<String, Value>,
    proofs: Vec<Proof>,
    /// Why it broke off before the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

#[derive(Debug, Serialize)]
struct Proof {
    claim: String,
    expected: Value,
    found: Value,
    holds: bool,
}

impl Report {
    pub fn new(demo: &'static str) -> Self {
        let (server, figures) = (Map::new(), Map::new());
        Self { demo, proven: false, server, figures, proofs: Vec::new(), error: None }
    }

    pub fn server(&mut self, name: &str, value: impl Into<Value>) {
        self.server.insert(name.to_owned(), value.into());
    }

    /// Notes a figure that proves nothing by itself.
    pub fn figure(&mut self, name: &str, value: impl Into<Value>) {
        self.figures.insert(name.to_owned(), value.into());
    }

    pub fn prove(&mut self, claim: impl Into<String>, expected: impl Into<Value>, found: impl Into<Value>) {
        let (expected, found) = (expected.into(), found.into());
        let holds = expected == found;
        self.add(Proof { claim: claim.into(), expected, found, holds });
    }

    pub fn prove_at_least(&mut self, claim: impl Into<String>, least: i64, found: i64) {
        let expected = format!("at least {least}").into();
        self.add(Proof { claim: claim.into(), expected, found: found.into(), holds: found >= least });
    }

    fn add(&mut self, proof: Proof) {
        self.proofs.push(proof);
        self.proven = self.error.is_none() && self.proofs.iter().all(|proof| proof.holds);
    }

    /// Something that should have been seen was not, so the rest was not looked at.
    pub fn broke_off(&mut self, error: String) {
        self.proven = false;
        self.error = Some(error);
    }

    pub fn is_proven(&self) -> bool {
        self.proven
    }

    pub fn print(&self, json: bool) -> std::io::Result<()> {
        let mut out = anstream::stdout().lock();
        if json {
            return writeln!(out, "{}", serde_json::to_string_pretty(self)?);
        }
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let width = self.proofs.iter().map(|proof| proof.claim.chars().count()).max().unwrap_or(0);
        writeln!(out)?;
        for Proof { claim, expected, found, holds } in &self.proofs {
            match holds {
                true => writeln!(out, "   {GOOD}✓{GOOD:#} {claim:<width$}  {}", text(found))?,
                false => writeln!(
                    out,
                    "   {BAD}✗ {claim:<width$}  {}{BAD:#}, but should be {}",
                    text(found),
                    text(expected)
                )?,
            }
        }
        if let Some(error) = &self.error {
            writeln!(out, "   {BAD}✗ {error}{BAD:#}")?;
        }
        let engines = |name: &str| self.server.get(name).map(text).unwrap_or_default();
        let place = format!("{} on {} with the {} queue", self.demo, engines("database"), engines("broker"));
        match self.proven {
            true => writeln!(out, "{GOOD}Proven{GOOD:#}: {place}."),
            false => writeln!(out, "{BAD}Not proven{BAD:#}: {place}."),
        }
    }
}

/// Several as one JSON object.
pub fn print_all(reports: &[Report]) -> std::io::Result<()> {
    let proven = reports.iter().all(Report::is_proven);
    let all = json!({ "proven": proven, "demos": reports });
    writeln!(anstream::stdout(), "{}", serde_json::to_string_pretty(&all)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_proof_that_does_not_hold_is_enough() {
        let mut report = Report::new("test");
        assert!(!report.is_proven(), "nothing looked at is nothing proven");
        report.prove("orders", 60, 60);
        report.prove_at_least("depth", 60, 61);
        assert!(report.is_proven());
        report.prove_at_least("duplicates", 1, 0);
        report.prove("orders", 60, 60);
        assert!(!report.is_proven());
        let mut cut_short = Report::new("test");
        cut_short.broke_off("no word".to_owned());
        cut_short.prove("orders", 60, 60);
        assert!(!cut_short.is_proven());
    }
}
