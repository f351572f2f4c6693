// SPDX-License-Identifier: Apache-2.0

package control

import (
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

// secretSite is a site whose configuration names files with secrets.
type secretSite struct{ *site[*desired.Balancer] }

func (s *secretSite) writeSecrets(key, password string) {
	s.t.Helper()
	for name, content := range map[string]string{"signal.key": key, "password": password} {
		testhost.Must(s.t, os.WriteFile(filepath.Join(filepath.Dir(s.file), name), []byte(content), 0o600))
	}
}

var peer = netip.MustParseAddr("2001:db8::fe")

func secretsOf(digit byte, password string) desired.Secrets {
	key := desired.SignalKey{}
	for i := range key {
		key[i] = digit<<4 | digit
	}
	return desired.Secrets{SignalKeys: desired.SignalKeys{key}, Passwords: desired.Passwords{peer.String(): password}}
}

// A change keeps the secrets that were read with the configuration file, even if their files have
// changed since. A reload reads all files, or changes nothing.
func TestChangesReadNoSecrets(t *testing.T) {
	s := &secretSite{newSite(t)}
	s.writeSecrets(strings.Repeat("1", 32), "first")
	s.edit("node: {", "bgp: {asn: 64512, router-id: 192.0.2.1, peers: "+
		"[{address: \"2001:db8::fe\", asn: 64513, password-file: \""+filepath.Dir(s.file)+"/password\"}]}\n"+
		"node: {signal-key: \""+filepath.Dir(s.file)+"/signal.key\", ")
	s.load()
	require := func(when string, want desired.Secrets) {
		t.Helper()
		if got := s.runner.secrets; !reflect.DeepEqual(got, want) {
			t.Errorf("%s: the process follows %v, want %v", when, got, want)
		}
		if got := s.Secrets(); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %v are in force, want %v", when, got, want)
		}
	}
	first := secretsOf(1, "first")
	for _, files := range []struct{ when, key, password string }{
		{"new files", strings.Repeat("2", 32), "second"}, {"half-written files", "22", ""},
	} {
		s.writeSecrets(files.key, files.password)
		s.change(drain("s1", true))
		require(files.when, first)
		s.change(drain("s1", false))
		require(files.when, first)
	}
	_, err := s.Reload(t.Context())
	for _, want := range []string{
		s.file + ": node.signal-key ", "line 1 has 2 bytes", s.file + ": bgp.peers[0].password-file ", "must hold a password",
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("a reload with half-written files: error %v, want %s", err, want)
		}
	}
	if _, _, err := LoadBalancer(s.file); err == nil || !strings.HasPrefix(err.Error(), s.file+": node.signal-key ") {
		t.Errorf("a start with half-written files: error %v", err)
	}
	s.change(drain("s1", true))
	require("after a refused reload", first)
	s.writeSecrets(strings.Repeat("2", 32), "second")
	if _, err := s.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	require("after a reload", secretsOf(2, "second"))
}

// The services of a store come with the secrets of the balancer's own file.
func TestSecretsOfFleet(t *testing.T) {
	files, _, err := config.ParseBalancerFiles([]byte("node: {interface: eth0, name: a}\n" +
		"store: {etcd: {endpoints: [\"https://192.0.2.1:2379\"], prefix: /segue/main}}\n"))
	testhost.Must(t, err)
	files.Secrets = secretsOf(1, "first")
	stored, _, err := config.WithStored(files, nil, nil)
	if err != nil || !reflect.DeepEqual(stored.Secrets, files.Secrets) {
		t.Errorf("secrets %v, error %v", stored.Secrets, err)
	}
}
