//! A folder for one run of a command, gone afterwards.

use std::path::{Path, PathBuf};

use stockade_kernel::clock::mint_id;

pub struct Scratch {
    folder: PathBuf,
}

impl Scratch {
    /// `name` is the command's, for whoever looks into the temporary folder.
    pub fn new(name: &str) -> std::io::Result<Self> {
        let folder = std::env::temp_dir().join(format!("stockade-{name}-{}", mint_id()));
        std::fs::create_dir(&folder)?;
        Ok(Self { folder })
    }

    pub fn path(&self) -> &Path {
        &self.folder
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What cannot be removed is the temporary folder's owner's to clean.
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
