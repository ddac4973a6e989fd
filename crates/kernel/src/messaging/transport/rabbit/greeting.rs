//! What a broker says of itself before anybody has logged in. lapin keeps it to itself, so it is asked by hand; only
//! `doctor` does.

use std::time::Duration;

use lapin::uri::AMQPScheme;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// How a client of AMQP 0-9-1 begins.
const HELLO: &[u8] = b"AMQP\x00\x00\x09\x01";
/// In the table of properties that the broker answers with: a short string, and a long one whose length follows.
const VERSION: &[u8] = b"\x07versionS";
const TIMEOUT: Duration = Duration::from_secs(2);
const BYTES_MAX: usize = 4096;

/// The version of the broker there; `None` if it does not tell, or speaks TLS.
pub async fn version(host: &str, port: u16, scheme: &AMQPScheme) -> Option<String> {
    if !matches!(scheme, AMQPScheme::AMQP) {
        return None;
    }
    timeout(TIMEOUT, greet(host, port)).await.ok()?.ok()?
}

async fn greet(host: &str, port: u16) -> std::io::Result<Option<String>> {
    let mut stream = TcpStream::connect((host, port)).await?;
    stream.write_all(HELLO).await?;
    let mut greeting = Vec::new();
    while greeting.len() < BYTES_MAX && stream.read_buf(&mut greeting).await? > 0 {
        if let Some(version) = read_version(&greeting) {
            return Ok(Some(version));
        }
    }
    Ok(None)
}

fn read_version(greeting: &[u8]) -> Option<String> {
    let start = greeting.windows(VERSION.len()).position(|window| window == VERSION)? + VERSION.len();
    let length = greeting.get(start..start + 4)?.try_into().ok().map(u32::from_be_bytes)?;
    let text = greeting.get(start + 4..start + 4 + usize::try_from(length).ok()?)?;
    std::str::from_utf8(text).ok().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_found_once_all_of_it_has_come() {
        let greeting = b"..\x07productS\x00\x00\x00\x08RabbitMQ\x07versionS\x00\x00\x00\x063.10.8..";
        assert_eq!(read_version(greeting).as_deref(), Some("3.10.8"));
        assert_eq!(read_version(&greeting[..greeting.len() - 4]), None);
        assert_eq!(read_version(b"HTTP/1.1 400"), None);
    }
}
