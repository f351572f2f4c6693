// SPDX-License-Identifier: Apache-2.0

package desired

import (
	"net/url"
	"slices"
	"strings"

	"github.com/segue-lb/segue/internal/fieldpath"
)

// Store is where the services of a fleet of balancers come from, instead of the balancer's own
// file.
type Store struct {
	Etcd Etcd `yaml:"etcd"`
	// MaxRemovedPercent is the largest share of a service's servers that one version of the store may
	// remove, drain or give the weight 0. One server is allowed in any case, unless it is the last
	// that takes new flows. If a version exceeds this, the balancer keeps its state until an operator
	// confirms the version.
	MaxRemovedPercent uint32 `yaml:"max-removed-percent" range:"0 to 100"` // default 30
}

// Etcd names a cluster of etcd, and a fleet in it.
type Etcd struct {
	// Endpoints are the URLs of the cluster's members: all http, or all https.
	Endpoints []string `yaml:"endpoints"`
	// Prefix is the first part of the keys of the fleet, such as /segue/main. It begins with a
	// slash.
	Prefix string `yaml:"prefix"`
	// TLSFiles are for https only. Without CAFile, the authorities of the system sign the members'
	// certificates.
	TLSFiles `yaml:",inline"`
	// Username and PasswordFile are for a cluster with users. The file has the password in one
	// line. Both or none of them are set.
	Username     string `yaml:"username,omitempty"`
	PasswordFile string `yaml:"password-file,omitempty"`
}

// DefaultMaxRemovedPercent is the default of Store.MaxRemovedPercent.
const DefaultMaxRemovedPercent = 30

// UsesTLS tells whether the connections are encrypted.
func (e *Etcd) UsesTLS() bool {
	return len(e.Endpoints) > 0 && strings.HasPrefix(e.Endpoints[0], "https:")
}

// fixed returns the fields whose change needs a restart. They have empty values without a store.
func (s *Store) fixed() []Setting {
	var e Etcd
	if s != nil {
		e = s.Etcd
	}
	return slices.Concat([]Setting{
		setting("store.etcd.endpoints", strings.Join(e.Endpoints, ", ")),
		setting("store.etcd.prefix", e.Prefix),
	}, e.TLSFiles.fixed("store.etcd"), []Setting{
		setting("store.etcd.username", e.Username),
		setting("store.etcd.password-file", e.PasswordFile),
	})
}

const storePath = "store"

// defaultStore sets the defaults of the section store, if there is one.
func (given Given) defaultStore(s *Store) {
	if s != nil {
		setDefault(given, fieldpath.Child(storePath, "max-removed-percent"), &s.MaxRemovedPercent,
			DefaultMaxRemovedPercent)
	}
}

func (r *rules) checkStore(b *Balancer) {
	if b.Store == nil {
		return
	}
	if b.Node.State == "" {
		r.failf("node.state", "required by store: the balancer keeps there what it has read")
	}
	etcd, path := &b.Store.Etcd, fieldpath.Child(storePath, "etcd")
	at := fieldpath.Child(path, "endpoints")
	if len(etcd.Endpoints) == 0 {
		r.failf(at, "at least one is required")
	}
	seen := map[string]string{}
	for i, endpoint := range etcd.Endpoints {
		r.checkEndpoint(fieldpath.Item(at, i), endpoint, etcd.UsesTLS())
		checkUnique(r, seen, endpoint, fieldpath.Item(at, i))
	}
	at = fieldpath.Child(path, "prefix")
	switch prefix := etcd.Prefix; {
	case prefix == "":
		r.failf(at, "required")
	case !strings.HasPrefix(prefix, "/") || strings.Trim(prefix, "/") == "" || strings.Contains(prefix, "//"):
		r.failf(at, "must begin with a slash and name the fleet, such as /segue/main")
	}
	r.checkStoreFiles(path, etcd)
}

// checkEndpoint checks the URL of a member of etcd.
func (r *rules) checkEndpoint(path, endpoint string, usesTLS bool) {
	parsed, err := url.Parse(endpoint)
	switch {
	case err != nil || !isMember(parsed):
		r.failf(path, "must be the URL of a member of etcd, such as https://etcd1.example:2379")
	case (parsed.Scheme == "https") != usesTLS:
		r.failf(path, "must have the same scheme, http or https, as the other endpoints")
	}
}

// isMember tells whether a URL has a scheme, a host and a port, and nothing else.
func isMember(u *url.URL) bool {
	isHTTP := u.Scheme == "http" || u.Scheme == "https"
	hasMore := u.User != nil || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != ""
	return isHTTP && u.Host != "" && u.Port() != "" && !hasMore
}

// checkStoreFiles checks the names of files without reading them.
func (r *rules) checkStoreFiles(path string, e *Etcd) {
	unused := ""
	if len(e.Endpoints) > 0 && !e.UsesTLS() {
		unused = "the endpoints are http, and certificates need https"
	}
	r.checkTLSFiles(path, &e.TLSFiles, unused)
	r.checkAbsolute(fieldpath.Child(path, "password-file"), e.PasswordFile)
	r.checkPair(path, "username", e.Username, "password-file", e.PasswordFile)
}

// checkPair checks that two fields, whose values are a and b, are both set or both empty.
func (r *rules) checkPair(path, first, a, second, b string) {
	switch {
	case a != "" && b == "":
		r.failf(fieldpath.Child(path, second), "required by %s", first)
	case a == "" && b != "":
		r.failf(fieldpath.Child(path, first), "required by %s", second)
	}
}
