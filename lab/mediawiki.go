// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"

	"github.com/segue-lb/segue/lab/wiki"
)

// Each server with the application mediawiki runs an Apache with PHP, a MariaDB and a memcached of
// its own, as the servers in the papers do (6LB, section VI-C; SRLB, section VI). The pages of the
// wiki are generated. Their import takes a minute. So the lab imports them once and keeps the
// database, and each server gets a copy.

// MediaWikiServers describes the wiki of the servers with the application mediawiki. ApacheServers
// describes their Apache.
type MediaWikiServers struct {
	// Pages is the number of generated pages.
	Pages int `yaml:"pages" range:"1 to 100000"`
	// Seed is the seed of the random text in the pages.
	Seed uint64 `yaml:"seed"`
}

// problems calls fail if a setting is out of range.
func (m MediaWikiServers) problems(fail func(path string, value any, format string, args ...any)) {
	if m.Pages < 1 || m.Pages > wiki.MaxPages {
		fail("mediawiki.pages", m.Pages, "must be 1 to %d", wiki.MaxPages)
	}
}

// Wiki returns the wiki of the servers with the application mediawiki.
func (t Topology) Wiki() *wiki.Wiki { return wiki.New(t.MediaWiki.Pages, t.MediaWiki.Seed) }

const (
	// dataRoot contains the databases. They are too large for stateRoot, which may be in memory.
	dataRoot = "/var/lib/segue"
	labsData = dataRoot + "/lab"
	// mediaWiki is the directory in which the package mediawiki installs its programs.
	mediaWiki = "/usr/share/mediawiki"
	// webUser runs all programs of a server with the application mediawiki.
	webUser = "www-data"

	mariaDBPort   = 3306
	memcachedPort = 11211
)

// dataDir contains the databases of a lab's servers.
func dataDir(lab string) string { return filepath.Join(labsData, lab) }

// wikiDir returns a path in the node's copy of the wiki. The copy has the directory database of
// MariaDB, and the directory texts with the texts of MediaWiki's user interface.
func (n *Node) wikiDir(elem ...string) string {
	return filepath.Join(append([]string{dataDir(n.lab.Name), n.Name}, elem...)...)
}

// databaseSocket returns the socket at which MediaWiki connects to the node's database.
func (n *Node) databaseSocket() string { return n.wikiDir("database", "socket") }

// mariaDB returns the node's database server. Only processes of the node can reach it, so it needs
// no users and no passwords (--skip-grant-tables).
func (n *Node) mariaDB() Process {
	return Process{
		Name: "mariadb", node: n, port: mariaDBPort, limited: n.cpus() > 0,
		args: []string{
			"mariadbd", "--no-defaults", "--user=" + webUser,
			"--datadir=" + n.wikiDir("database"), "--socket=" + n.databaseSocket(),
			"--pid-file=" + n.wikiDir("database", "pid"),
			"--bind-address=127.0.0.1", "--port=" + strconv.Itoa(mariaDBPort),
			"--skip-grant-tables", "--performance-schema=OFF", "--max-connections=4200",
			"--innodb-buffer-pool-size=128M", "--innodb-log-file-size=16M",
			// Writes are fast and not durable: after a crash, nobody needs this copy of the
			// database.
			"--innodb-flush-log-at-trx-commit=0", "--innodb-use-native-aio=0",
		},
	}
}

// memcached returns the node's cache.
func (n *Node) memcached() Process {
	return Process{
		Name: "memcached", node: n, port: memcachedPort, limited: n.cpus() > 0,
		args: []string{
			"memcached", "-u", webUser, "-l", "127.0.0.1", "-p", strconv.Itoa(memcachedPort),
			"-U", "0", "-m", "256", "-c", "4200",
		},
	}
}

// phpModule returns the file of Apache's module for PHP. Its name contains the version of PHP. Of
// several versions, phpModule returns the last one in alphabetical order.
func phpModule() (string, error) {
	files, err := filepath.Glob("/usr/lib/apache2/modules/libphp*.so")
	if err == nil && len(files) == 0 {
		err = fs.ErrNotExist
	}
	if err != nil {
		return "", fmt.Errorf("the module of Apache for PHP: %w", err)
	}
	return slices.Max(files), nil
}

var versionLine = regexp.MustCompile(`define\( 'MW_VERSION', '([0-9A-Za-z.-]+)' \)`)

// mediaWikiVersion returns the version of the installed MediaWiki, such as 1.39.17.
func mediaWikiVersion() (string, error) {
	path := filepath.Join(mediaWiki, "includes", "Defines.php")
	text, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	match := versionLine.FindSubmatch(text)
	if match == nil {
		return "", fmt.Errorf("%s does not define MW_VERSION", path)
	}
	return string(match[1]), nil
}

// checkMediaWiki returns an error if a server runs MediaWiki and a program for it is missing.
func (t Topology) checkMediaWiki() error {
	if !slices.Contains(t.Applications, MediaWiki) {
		return nil
	}
	_, noModule := phpModule()
	_, noVersion := mediaWikiVersion()
	err := errors.Join(noModule, noVersion)
	for _, program := range []string{"apache2", "php", "mariadbd", "memcached", "setpriv", "cp"} {
		_, missing := exec.LookPath(program)
		err = errors.Join(err, missing)
	}
	if err != nil {
		return fmt.Errorf("the application %s needs packages, which `make mediawiki` installs "+
			"in a checkout of Segue: %w", MediaWiki, err)
	}
	return nil
}

// writeMediaWikiConfig writes LocalSettings.php, MediaWiki's configuration.
func (n *Node) writeMediaWikiConfig() error {
	return n.writeConfig("LocalSettings.php", struct{ Path, Socket, Cache string }{
		wiki.Path, n.databaseSocket(), n.wikiDir("texts"),
	})
}

// prepareWikis gives each server with the application mediawiki a copy of the wiki. If no earlier
// lab has kept the same wiki, prepareWikis first imports it.
func (l *Lab) prepareWikis(ctx context.Context) error {
	// After a reboot, data of an earlier lab with this name may be left.
	if err := os.RemoveAll(dataDir(l.Name)); err != nil {
		return err
	}
	if err := os.MkdirAll(dataDir(l.Name), 0o755); err != nil {
		return err
	}
	version, err := mediaWikiVersion()
	if err != nil {
		return err
	}
	m := l.Topology.MediaWiki
	kept := filepath.Join(dataRoot, "wiki",
		fmt.Sprintf("%s-%d-pages-seed-%d-generator-%d", version, m.Pages, m.Seed, wiki.Version))
	var servers []*Node
	for _, n := range l.Nodes {
		if n.Application == MediaWiki {
			servers = append(servers, n)
		}
	}
	if _, err := os.Stat(kept); errors.Is(err, fs.ErrNotExist) {
		l.progress("Importing the generated wiki into " + kept + ". Later labs copy it.")
		if err := servers[0].importWiki(ctx, kept); err != nil {
			return fmt.Errorf("%s: import the wiki: %w", servers[0].Name, err)
		}
	}
	for _, n := range servers {
		if _, err := n.Run(ctx, "cp", "--archive", "--reflink=auto", kept, n.wikiDir()); err != nil {
			return err
		}
	}
	return nil
}

// importWiki makes the database of the wiki on the node, and moves it to the directory target, from
// which servers copy it. All processes of the import run in the node's network namespace, so Down
// can end them.
func (n *Node) importWiki(ctx context.Context, target string) error {
	if err := n.makeWikiDir(); err != nil {
		return err
	}
	database := n.mariaDB()
	database.limited = false // the limit of CPU time is for experiments
	if err := database.Start(ctx); err != nil {
		return err
	}
	if err := errors.Join(n.fillWiki(ctx), database.Stop()); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
		return err
	}
	err := os.Rename(n.wikiDir(), target)
	if errors.Is(err, fs.ErrExist) { // another lab was faster
		return os.RemoveAll(n.wikiDir())
	}
	return err
}

// makeWikiDir makes the directories of an empty wiki, and gives them to webUser.
func (n *Node) makeWikiDir() error {
	owner, err := user.Lookup(webUser)
	if err != nil {
		return err
	}
	uid, _ := strconv.Atoi(owner.Uid)
	gid, _ := strconv.Atoi(owner.Gid)
	for _, dir := range []string{n.wikiDir(), n.wikiDir("database"), n.wikiDir("texts")} {
		if err := errors.Join(os.Mkdir(dir, 0o700), os.Chown(dir, uid, gid)); err != nil {
			return err
		}
	}
	return nil
}

// fillWiki has MediaWiki make its tables and import the pages.
func (n *Node) fillWiki(ctx context.Context) error {
	installed := n.wikiDir("LocalSettings.php") // written by install.php; the lab uses its own later
	defer os.Remove(installed)
	err := n.maintain(ctx, installed, "install.php", "--confpath", n.wikiDir(),
		"--dbtype", "mysql", "--dbserver", "localhost:"+n.databaseSocket(), "--dbname", "wiki",
		"--dbuser", "root", "--dbpass", "", "--pass", rand.Text(), "--server", "http://wiki.test",
		"--scriptpath", wiki.Path, "Generated wiki", "Administrator")
	if err != nil {
		return err
	}
	dump := n.wikiDir("pages.xml")
	defer os.Remove(dump)
	file, err := os.Create(dump)
	if err != nil {
		return err
	}
	if err := errors.Join(n.lab.Topology.Wiki().Dump(file), file.Close()); err != nil {
		return err
	}
	settings := n.configPath("LocalSettings.php")
	for _, step := range [][]string{
		{"importDump.php", "--no-updates", "--quiet", dump},
		{"initSiteStats.php", "--update"},
		{"rebuildLocalisationCache.php", "--lang=en", "--quiet"},
	} {
		if err := n.maintain(ctx, settings, step[0], step[1:]...); err != nil {
			return err
		}
	}
	return nil
}

// maintain runs one of MediaWiki's maintenance scripts as webUser. settings is the file of
// MediaWiki's configuration.
func (n *Node) maintain(ctx context.Context, settings, script string, args ...string) error {
	command := append([]string{
		"--reuid=" + webUser, "--regid=" + webUser, "--clear-groups",
		"env", "MW_CONFIG_FILE=" + settings, "php", filepath.Join(mediaWiki, "maintenance", script),
	}, args...)
	_, err := n.Run(ctx, "setpriv", command...)
	return err
}
