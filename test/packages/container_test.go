// SPDX-License-Identifier: Apache-2.0

package packages

import (
	"crypto/x509"
	"encoding/json"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/testhost"
)

// image is the last stage of the Containerfile.
type image struct {
	files      map[string]string // where files of the build stage are in the image
	small      string            // the command of the build stage that makes files without the compiler
	entrypoint []string
}

func readImage(t *testing.T) image {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(project, "packaging/Containerfile"))
	must(t, err)
	_, stage, found := strings.Cut(string(text), "FROM scratch\n")
	if !found {
		t.Fatal("the last stage is not from scratch")
	}
	small := regexp.MustCompile(`(?m)^RUN (echo .*)$`).FindStringSubmatch(string(text))
	if small == nil {
		t.Fatal("the build stage makes no small files")
	}
	i := image{files: map[string]string{}, small: small[1]}
	for line := range strings.Lines(stage) {
		words := strings.Fields(line)
		switch words[0] {
		case "COPY":
			i.files[strings.TrimPrefix(words[2], "/src/")] = words[3]
		case "ENTRYPOINT":
			must(t, json.Unmarshal([]byte(strings.TrimPrefix(line, "ENTRYPOINT ")), &i.entrypoint))
		case "CMD":
		default:
			t.Fatalf("unknown instruction: %s", line)
		}
	}
	return i
}

// container is a `docker run` command of docs/operate/container.md.
type container struct {
	capabilities []string
	volumes      []string // FROM:TO or FROM:TO:ro
	args         []string // what follows the name of the image
}

func readContainer(t *testing.T, role string) container {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(project, "docs/operate/container.md"))
	must(t, err)
	command := regexp.MustCompile(`(?s)docker run [^\n]*--name segue-` + role + ` .*?\n\n`).FindString(string(text))
	command = strings.ReplaceAll(command, "\\\n", " ")
	options, args, found := strings.Cut(command, " segue "+role+" ")
	if !found || !strings.Contains(options, "--cap-drop ALL") {
		t.Fatalf("no command for the role %s that drops capabilities: %q", role, command)
	}
	c := container{args: append([]string{role}, strings.Fields(args)...)}
	words := strings.Fields(options)
	for i, word := range words {
		switch word {
		case "--cap-add":
			c.capabilities = append(c.capabilities, "CAP_"+words[i+1])
		case "-v":
			c.volumes = append(c.volumes, words[i+1])
		}
	}
	return c
}

// TestContainer runs the content of the image with the privileges that docs/operate/container.md gives
// to it. systemd takes the part of the container's runtime: it runs a process in another root.
func TestContainer(t *testing.T) {
	testhost.NeedNamespaces(t)
	testhost.NeedAgent(t)
	testhost.NeedCgroup2(t)
	testhost.NeedCommand(t, "ethtool", "ethtool")
	s := newSite(t, debianRoot(t, "bookworm"))
	s.server.runImage(t, "agent", agentFile)
	s.lb.runImage(t, "lb", lbFile)
	echoServers(t, s.server.net, tcpServices, udpService)
	load := startLoad(t, s.router, tcpServices, udpService)
	load.more(t)
	for m, role := range map[*machine]string{s.lb: "lb", s.server: "agent"} {
		m.must(t, "systemctl", "stop", "segue-"+role)
		load.more(t)
		m.startImage(t, role)
		load.more(t)
	}
	load.requireNoLoss(t)
}

// TestMaskedUnits installs the package beside a container, as docs/operate/container.md says: no unit
// starts, and the tables stay those of root.
func TestMaskedUnits(t *testing.T) {
	testhost.NeedNamespaces(t)
	text, err := os.ReadFile(filepath.Join(project, "docs/operate/container.md"))
	must(t, err)
	mask := regexp.MustCompile(`(?m)^    (systemctl mask .*)$`).FindStringSubmatch(string(text))
	if mask == nil {
		t.Fatal("docs/operate/container.md does not mask the units")
	}
	m := bootMachine(t, "lb", debianRoot(t, "bookworm"))
	must(t, os.Mkdir(filepath.Join(m.root, "etc/segue"), 0o755))
	m.write(t, "etc/segue/lb.yaml", lbFile, 0o644)
	m.must(t, "mkdir", "-p", "-m", "0700", "/sys/fs/bpf/segue/lb")
	m.must(t, strings.Fields(mask[1])...)
	m.dpkg(t, buildPackage(t, later))
	for _, unit := range []string{"segue-lb", "segue-agent", "segue-pins"} {
		m.requireState(t, unit, "masked", false)
	}
	if out := m.must(t, "stat", "--format=%U", "/sys/fs/bpf/segue"); out != "root\n" {
		t.Errorf("the tables belong to %s", out)
	}
}

// runImage makes the image's root and the host's folders in the machine, and starts the image.
func (m *machine) runImage(t *testing.T, role, file string) {
	t.Helper()
	buildPackage(t, later)
	build := t.TempDir() // has what the build stage has in its working directory
	must(t, os.Mkdir(filepath.Join(build, "bin"), 0o755))
	run(t, "cp", filepath.Join(project, "bin/package-"+later, "segue"), filepath.Join(build, "bin"))
	image := readImage(t)
	run(t, "sh", "-c", "cd "+build+" && "+image.small)
	for from, to := range image.files {
		if !path.IsAbs(from) {
			from = filepath.Join(build, from)
		}
		target := filepath.Join(m.root, "srv/image", to)
		must(t, os.MkdirAll(filepath.Dir(target), 0o755))
		run(t, "cp", "--dereference", from, target)
	}
	m.requireImage(t)
	must(t, os.MkdirAll(filepath.Join(m.root, "etc/segue"), 0o755))
	m.write(t, "etc/segue/signal.key", key, 0o400)
	m.write(t, path.Join("etc/segue", role+".yaml"), file, 0o644)
	m.must(t, "mkdir", "-p", "/run/segue", "/var/lib/segue")
	m.startImage(t, role)
}

// requireImage requires what the program reads of its root: the authorities of the system, for a
// store that is reached by TLS, and the names of groups.
func (m *machine) requireImage(t *testing.T) {
	t.Helper()
	authorities, err := os.ReadFile(filepath.Join(m.root, "srv/image/etc/ssl/certs/ca-certificates.crt"))
	must(t, err)
	if !x509.NewCertPool().AppendCertsFromPEM(authorities) {
		t.Error("the image has no certificates of authorities")
	}
	for _, name := range []string{"passwd", "group"} {
		content, err := os.ReadFile(filepath.Join(m.root, "srv/image/etc", name))
		if err != nil || !strings.HasPrefix(string(content), "root:x:0:") {
			t.Errorf("/etc/%s of the image: %q, %v", name, content, err)
		}
	}
}

func (m *machine) startImage(t *testing.T, role string) {
	t.Helper()
	c := readContainer(t, role)
	args := []string{"systemd-run", "--quiet", "--unit=segue-" + role, "--service-type=notify", "--property=NotifyAccess=main",
		"--property=RootDirectory=/srv/image", "--property=MountAPIVFS=yes", "--property=ReadOnlyPaths=/",
		"--property=CapabilityBoundingSet=" + strings.Join(c.capabilities, " "), "--property=NoNewPrivileges=yes"}
	for _, volume := range c.volumes {
		parts := strings.Split(volume, ":")
		kind := "BindPaths"
		if len(parts) == 3 {
			kind = "BindReadOnlyPaths"
		}
		args = append(args, fmt.Sprintf("--property=%s=%s:%s", kind, parts[0], parts[1]))
	}
	args = append(args, "--")
	args = append(args, readImage(t).entrypoint...)
	m.must(t, append(args, c.args...)...)
	status := m.must(t, "cat", "/proc/"+m.pid(t, "segue-"+role)+"/status")
	if got, want := statusField(status, "CapEff"), capabilityMask(t, c.capabilities); got != want {
		t.Errorf("the capabilities of %s are %s, want %s", role, got, want)
	}
}
