//! The simulated directory tree: names as everyone sees them, names a power cut surely leaves, and the changes between.
//!
//! A change of a name is promised by a sync of its directory (either directory of a rename) or of everything. After a
//! power cut each unpromised change is, independently, there or not; a rename is one change. Syncing a file promises
//! nothing about its name, and syncing a directory nothing about the directory's own name: stricter than ext4 and XFS.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::file::SimFile;
use super::rng::Rng;
use crate::io::{DirEntry, DiskError, FileClass};

/// A file or directory, whatever its name.
pub(super) type Inode = u64;

const ROOT: Inode = 0;
const ENOTDIR: i32 = 20;
const EISDIR: i32 = 21;

#[derive(Debug, Clone, Default)]
struct Directory {
    visible: BTreeMap<String, Inode>,
    durable: BTreeMap<String, Inode>,
}

#[derive(Debug, Clone)]
enum Node {
    File(SimFile),
    Directory(Directory),
}

/// A name within a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    dir: Inode,
    name: String,
}

/// One unpromised change of names, concerning one inode.
#[derive(Debug, Clone)]
struct Change {
    seq: u64,
    inode: Inode,
    from: Option<Place>,
    to: Option<Place>,
}

impl Change {
    fn touches(&self, dir: Inode) -> bool {
        [&self.from, &self.to]
            .into_iter()
            .flatten()
            .any(|place| place.dir == dir)
    }
}

/// All names and files. Clones are cheap: nodes are shared until changed.
#[derive(Debug, Clone)]
pub(super) struct Tree {
    nodes: BTreeMap<Inode, Arc<Node>>,
    changes: Vec<Change>,
    /// The durable name of every inode that has one.
    promised: BTreeMap<Inode, Place>,
    next: Inode,
}

impl Tree {
    pub(super) fn new() -> Tree {
        Tree {
            nodes: BTreeMap::from([(ROOT, Arc::new(Node::Directory(Directory::default())))]),
            changes: Vec::new(),
            promised: BTreeMap::new(),
            next: ROOT + 1,
        }
    }

    fn directory(&self, inode: Inode) -> Result<&Directory, DiskError> {
        match self.nodes.get(&inode).map(Arc::as_ref) {
            Some(Node::Directory(directory)) => Ok(directory),
            Some(Node::File(_)) => Err(DiskError::Io(ENOTDIR)),
            None => Err(DiskError::NotFound),
        }
    }

    fn directory_mut(&mut self, inode: Inode) -> Option<&mut Directory> {
        match self.nodes.get_mut(&inode).map(Arc::make_mut) {
            Some(Node::Directory(directory)) => Some(directory),
            Some(Node::File(_)) | None => None,
        }
    }

    pub(super) fn file(&self, inode: Inode) -> &SimFile {
        match self.nodes.get(&inode).map(Arc::as_ref) {
            Some(Node::File(file)) => file,
            _ => panic!("inode {inode} is a file that is open or named"),
        }
    }

    pub(super) fn file_mut(&mut self, inode: Inode) -> &mut SimFile {
        match self.nodes.get_mut(&inode).map(Arc::make_mut) {
            Some(Node::File(file)) => file,
            _ => panic!("inode {inode} is a file that is open or named"),
        }
    }

    /// Inode of the directory at `path`; "" and "." are the root.
    fn resolve_dir(&self, path: &str) -> Result<Inode, DiskError> {
        let mut at = ROOT;
        for name in path.split('/').filter(|name| !name.is_empty() && *name != ".") {
            let inode = self.directory(at)?.visible.get(name);
            at = *inode.ok_or(DiskError::NotFound)?;
        }
        self.directory(at).map(|_| at)
    }

    fn place(&self, path: &str) -> Result<Place, DiskError> {
        let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
        assert!(
            !name.is_empty() && name != "." && name != "..",
            "a name in {path:?}"
        );
        Ok(Place {
            dir: self.resolve_dir(parent)?,
            name: name.to_owned(),
        })
    }

    fn lookup(&self, place: &Place) -> Option<Inode> {
        self.directory(place.dir).ok()?.visible.get(&place.name).copied()
    }

    /// Inode and class of the file at `path`, when there is one.
    pub(super) fn find(&self, path: &str) -> Option<(Inode, FileClass)> {
        let inode = self.lookup(&self.place(path).ok()?)?;
        match self.nodes.get(&inode).map(Arc::as_ref) {
            Some(Node::File(file)) => Some((inode, file.class)),
            _ => None,
        }
    }

    /// Inodes of all files of `class` that have a name.
    pub(super) fn files_of(&self, class: FileClass) -> Vec<Inode> {
        let mut named = BTreeSet::new();
        self.reach(ROOT, true, &mut named);
        named.retain(
            |inode| matches!(self.nodes.get(inode).map(Arc::as_ref), Some(Node::File(f)) if f.class == class),
        );
        named.into_iter().collect()
    }

    fn add(&mut self, node: Node) -> Inode {
        let inode = self.next;
        self.next += 1;
        self.nodes.insert(inode, Arc::new(node));
        inode
    }

    fn change(&mut self, seq: u64, inode: Inode, from: Option<Place>, to: Option<Place>) {
        let change = Change { seq, inode, from, to };
        self.apply(&change, true);
        self.changes.push(change);
    }

    fn apply(&mut self, change: &Change, visible: bool) {
        // Without hard links an inode has one name: a later change holds whichever earlier ones were lost.
        let old = match visible {
            true => change.from.clone(),
            false => self.promised.remove(&change.inode),
        };
        if let Some(place) = old
            && let Some(directory) = self.directory_mut(place.dir)
        {
            let names = directory.names_mut(visible);
            if names.get(&place.name) == Some(&change.inode) {
                names.remove(&place.name);
            }
        }
        if let Some(to) = &change.to
            && let Some(directory) = self.directory_mut(to.dir)
        {
            let replaced = directory.names_mut(visible).insert(to.name.clone(), change.inode);
            if !visible {
                replaced.map(|inode| self.promised.remove(&inode));
                self.promised.insert(change.inode, to.clone());
            }
        }
    }

    /// Opens the file at `path`, making an empty one when it is missing and `create` is set.
    pub(super) fn open(
        &mut self,
        seq: u64,
        path: &str,
        class: FileClass,
        create: bool,
    ) -> Result<Inode, DiskError> {
        let place = self.place(path)?;
        match self.lookup(&place) {
            Some(inode) if self.directory(inode).is_ok() => Err(DiskError::Io(EISDIR)),
            Some(inode) => {
                self.file_mut(inode).class = class;
                Ok(inode)
            }
            None if create => {
                let inode = self.add(Node::File(SimFile::new(class)));
                self.change(seq, inode, None, Some(place));
                Ok(inode)
            }
            None => Err(DiskError::NotFound),
        }
    }

    pub(super) fn make_dir(&mut self, seq: u64, path: &str) -> Result<(), DiskError> {
        let place = self.place(path)?;
        if self.lookup(&place).is_some() {
            return Err(DiskError::Exists);
        }
        let inode = self.add(Node::Directory(Directory::default()));
        self.change(seq, inode, None, Some(place));
        Ok(())
    }

    pub(super) fn remove_dir(&mut self, seq: u64, path: &str) -> Result<(), DiskError> {
        let place = self.place(path)?;
        let inode = self.lookup(&place).ok_or(DiskError::NotFound)?;
        if !self.directory(inode)?.visible.is_empty() {
            return Err(DiskError::Exists);
        }
        self.change(seq, inode, Some(place), None);
        Ok(())
    }

    pub(super) fn unlink(&mut self, seq: u64, path: &str) -> Result<(), DiskError> {
        let place = self.place(path)?;
        let inode = self.lookup(&place).ok_or(DiskError::NotFound)?;
        if self.directory(inode).is_ok() {
            return Err(DiskError::Io(EISDIR));
        }
        self.change(seq, inode, Some(place), None);
        Ok(())
    }

    pub(super) fn rename(&mut self, seq: u64, from: &str, to: &str) -> Result<(), DiskError> {
        let (from, to) = (self.place(from)?, self.place(to)?);
        let inode = self.lookup(&from).ok_or(DiskError::NotFound)?;
        if from == to {
            return Ok(());
        }
        let moves_dir = self.directory(inode).is_ok();
        if let Some(target) = self.lookup(&to) {
            match (moves_dir, self.directory(target)) {
                (true, Ok(directory)) if !directory.visible.is_empty() => return Err(DiskError::Exists),
                (true, Err(_)) => return Err(DiskError::Io(ENOTDIR)),
                (false, Ok(_)) => return Err(DiskError::Io(EISDIR)),
                (true, Ok(_)) | (false, Err(_)) => {}
            }
        }
        self.change(seq, inode, Some(from), Some(to));
        Ok(())
    }

    /// Names in the directory at `path`, sorted.
    pub(super) fn list(&self, path: &str) -> Result<Vec<DirEntry>, DiskError> {
        let directory = self.directory(self.resolve_dir(path)?)?;
        let entry = |(name, inode): (&String, &Inode)| {
            let len = match self.nodes.get(inode).map(Arc::as_ref) {
                Some(Node::File(file)) => Some(file.len()),
                _ => None,
            };
            DirEntry {
                name: name.clone(),
                is_dir: len.is_none(),
                len: len.unwrap_or(0),
            }
        };
        Ok(directory.visible.iter().map(entry).collect())
    }

    pub(super) fn dir_exists(&self, path: &str) -> Result<(), DiskError> {
        self.resolve_dir(path).map(|_| ())
    }

    /// Promises the changes up to `upto` in one directory. What happened before to the same inodes comes with them,
    /// as no file system shows a rename without the file it moved.
    pub(super) fn sync_dir(&mut self, path: &str, upto: u64) -> Result<(), DiskError> {
        let dir = self.resolve_dir(path)?;
        let mut inodes = BTreeSet::new();
        let mut due = vec![false; self.changes.len()];
        for (due, change) in due.iter_mut().zip(&self.changes).rev() {
            *due = (change.seq <= upto && change.touches(dir)) || inodes.contains(&change.inode);
            if *due {
                inodes.insert(change.inode);
            }
        }
        let mut due = due.into_iter();
        self.commit(|_| due.next().unwrap_or(false));
        Ok(())
    }

    /// Promises all names and all contents up to `upto`.
    pub(super) fn sync_all(&mut self, upto: u64) {
        self.commit(|change| change.seq <= upto);
        self.each_file(|file| file.sync(upto));
    }

    /// A failed sync of everything: see [`SimFile::sync_failed`]; names stay unpromised.
    pub(super) fn sync_all_failed(&mut self, upto: u64, evict: bool, rng: &mut Rng) {
        self.each_file(|file| file.sync_failed(upto, evict, rng));
    }

    fn each_file(&mut self, mut f: impl FnMut(&mut SimFile)) {
        for node in self.nodes.values_mut() {
            if matches!(node.as_ref(), Node::File(_))
                && let Node::File(file) = Arc::make_mut(node)
            {
                f(file);
            }
        }
    }

    fn commit(&mut self, mut due: impl FnMut(&Change) -> bool) {
        let (now, later) = std::mem::take(&mut self.changes)
            .into_iter()
            .partition(|change| due(change));
        self.changes = later;
        let now: Vec<Change> = now;
        now.iter().for_each(|change| self.apply(change, false));
    }

    /// What a power cut leaves: `keep` in 4 of the unpromised changes and sectors survive.
    pub(super) fn lose_power(&mut self, keep: u64, rng: &mut Rng) {
        self.commit(|_| rng.odds(keep, 4));
        self.changes.clear();
        for node in self.nodes.values_mut() {
            match Arc::make_mut(node) {
                Node::File(file) => file.lose_power(keep, rng),
                Node::Directory(directory) => directory.visible = directory.durable.clone(),
            }
        }
        self.collect(&BTreeSet::new());
    }

    /// Forgets what nothing can reach any more.
    pub(super) fn collect(&mut self, open: &BTreeSet<Inode>) {
        let mut alive = open.clone();
        alive.insert(ROOT);
        self.reach(ROOT, true, &mut alive);
        self.reach(ROOT, false, &mut alive);
        for change in &self.changes {
            alive.insert(change.inode);
            self.reach(change.inode, true, &mut alive);
            self.reach(change.inode, false, &mut alive);
            let places = [&change.from, &change.to];
            alive.extend(places.into_iter().flatten().map(|place| place.dir));
        }
        self.nodes.retain(|inode, _| alive.contains(inode));
        self.promised.retain(|inode, _| alive.contains(inode));
    }

    fn reach(&self, from: Inode, visible: bool, found: &mut BTreeSet<Inode>) {
        let Ok(directory) = self.directory(from) else {
            return;
        };
        for inode in directory.names(visible).values() {
            found.insert(*inode);
            self.reach(*inode, visible, found);
        }
    }

    /// Bytes of disk space taken by what has a name or is open; a directory takes one block.
    pub(super) fn used(&self, open: &BTreeSet<Inode>) -> u64 {
        let mut alive = open.clone();
        self.reach(ROOT, true, &mut alive);
        let size = |inode: &Inode| match self.nodes.get(inode).map(Arc::as_ref) {
            Some(Node::File(file)) => file.allocated(),
            Some(Node::Directory(_)) => crate::limits::BLOCK as u64,
            None => 0,
        };
        alive.iter().map(size).sum()
    }
}

impl Directory {
    fn names(&self, visible: bool) -> &BTreeMap<String, Inode> {
        match visible {
            true => &self.visible,
            false => &self.durable,
        }
    }

    fn names_mut(&mut self, visible: bool) -> &mut BTreeMap<String, Inode> {
        match visible {
            true => &mut self.visible,
            false => &mut self.durable,
        }
    }
}
