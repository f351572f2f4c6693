// SPDX-License-Identifier: Apache-2.0

package desired

import (
	"path/filepath"

	"github.com/segue-lb/segue/internal/fieldpath"
)

// TLSFiles are the absolute paths of the files by which both ends of a connection prove who they are.
// All files are in PEM.
type TLSFiles struct {
	// CAFile has the certificates of the authorities that sign the certificate of the other end.
	CAFile string `yaml:"ca-file,omitempty"`
	// CertFile and KeyFile have the certificate by which the balancer proves who it is, and its
	// key. Both or none of them are set.
	CertFile string `yaml:"cert-file,omitempty"`
	KeyFile  string `yaml:"key-file,omitempty"`
}

// fixed returns the files as settings of the section at a path.
func (f *TLSFiles) fixed(path string) []Setting {
	return []Setting{
		setting(fieldpath.Child(path, "ca-file"), f.CAFile),
		setting(fieldpath.Child(path, "cert-file"), f.CertFile),
		setting(fieldpath.Child(path, "key-file"), f.KeyFile),
	}
}

// checkTLSFiles checks the names of files without reading them. unused says why the section at the
// path uses no files; empty: it may use them.
func (r *rules) checkTLSFiles(path string, f *TLSFiles, unused string) {
	for _, each := range []struct{ name, file string }{
		{"ca-file", f.CAFile}, {"cert-file", f.CertFile}, {"key-file", f.KeyFile},
	} {
		r.checkAbsolute(fieldpath.Child(path, each.name), each.file)
		if filepath.IsAbs(each.file) && unused != "" {
			r.failf(fieldpath.Child(path, each.name), "not used: %s", unused)
		}
	}
	r.checkPair(path, "cert-file", f.CertFile, "key-file", f.KeyFile)
}

// checkAbsolute checks the name of a file that need not be given.
func (r *rules) checkAbsolute(path, file string) {
	if file != "" && !filepath.IsAbs(file) {
		r.failf(path, "must be absolute")
	}
}
