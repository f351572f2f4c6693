<?php
# SPDX-License-Identifier: Apache-2.0

if ( !defined( 'MEDIAWIKI' ) ) {
	exit;
}
$wgSitename = 'Generated wiki';
$wgServer = 'http://wiki.test';
$wgScriptPath = {{quote .Path}};
$wgUsePathInfo = true;

$wgDBtype = 'mysql';
$wgDBserver = {{quote (print "localhost:" .Socket)}};
$wgDBname = 'wiki';
$wgDBuser = 'root';
$wgDBpassword = '';
$wgDBTableOptions = 'ENGINE=InnoDB, DEFAULT CHARSET=binary';

# As on the servers in the papers, memcached keeps what can be computed again, such as the HTML of
# pages.
$wgMainCacheType = CACHE_MEMCACHED;
$wgMemCachedServers = [ '127.0.0.1:11211' ];
$wgCacheDirectory = {{quote .Cache}};
$wgLocalisationCacheConf['store'] = 'array';

# Nobody logs in, so the key need not be secret. A request runs no queued jobs.
$wgSecretKey = 'generated';
$wgJobRunRate = 0;
$wgPingback = false;
wfLoadSkin( 'Vector' );
